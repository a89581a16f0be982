"""Several processes as one engine: how they are started and talk to each other, what each has."""
