"""The ZeRO machinery: sharding, gathering, gradients, updates."""
