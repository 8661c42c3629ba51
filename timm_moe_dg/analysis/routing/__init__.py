"""What experts do with patches: where they are chosen, what for, and whether that holds in another domain."""
