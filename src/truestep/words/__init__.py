"""The words that everything else is said in: findings, errors, names, shards, layouts, scopes. Torch-free and pure."""
