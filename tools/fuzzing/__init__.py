"""What tools/fuzz.py is made of."""
