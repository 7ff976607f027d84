"""Foreign formats: how they are downloaded, checked and read."""
