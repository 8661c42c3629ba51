"""Dense feed-forward layers of timm, and their copies as experts."""
