"""The trained model in use: loaded, asked for predictions, exported."""
