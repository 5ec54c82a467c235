"""What is answered about jobs without a turn of theirs."""
