"""The modules of tools/fuzz.py: damage to files, and examples of files with their readers."""
