"""One operation: its torch twin and its fast form."""
