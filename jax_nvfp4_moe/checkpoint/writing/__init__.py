"""Write files and folders that are either complete or absent."""
