"""Two engines, or one with a setting changed, on the same requests: what differs, how surely."""
