"""Networks: building with starting weights, loading trained ones, freezing of parts, and saving."""
