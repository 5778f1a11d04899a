"""Facts of model versions, their cards and measurements, and the gates of aliases."""
