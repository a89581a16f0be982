"""What is asked of a server: lengths, texts, arrival times. A seed always gives the same."""
