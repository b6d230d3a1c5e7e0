"""Storage of run directories: local paths, and objects of S3, Google Cloud Storage or Azure."""
