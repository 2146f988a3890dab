"""What `dist-train doctor` looks at: one machine by itself, then the ranks of an allocation beside each other."""
