"""What is made of a network's answers about a benchmark: a table, files of numbers, pictures."""
