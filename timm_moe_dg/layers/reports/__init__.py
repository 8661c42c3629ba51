"""What layers report of a forward in training: the routing, and losses of their own."""
