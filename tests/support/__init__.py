"""What tests share: models, training, oracles and settings."""
