"""What a model will need and reach on a device, worked out from its config.json alone. No torch here."""
