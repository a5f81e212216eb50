"""What the commands do that belong to no other package, and what all of them print with."""
