"""One operation: a recurrence over a tree of draft tokens, in three forms that agree."""
