"""How experts compute: the grouped product, which explains the layer, and a faster path of the same results."""
