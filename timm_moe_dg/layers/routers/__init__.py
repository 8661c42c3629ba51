"""The choice of experts, and routers that are controls."""
