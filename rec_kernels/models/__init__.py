"""Networks and tables built from the ops and collections."""
