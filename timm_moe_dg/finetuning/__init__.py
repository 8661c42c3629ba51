"""The runtime of training: its options and plan, what feeds and steps the network, and how a run ends or goes on."""
