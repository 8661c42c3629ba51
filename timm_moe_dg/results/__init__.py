"""What is made of finished runs: tables by selection rule, comparisons, and the papers' figures beside them."""
