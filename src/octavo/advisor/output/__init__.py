"""A plan for people: one content, on a screen and in Markdown, and a picture."""
