"""The load generator: sends planned requests to a server, on time, and notes what comes back."""
