"""The contract between the planes: messages, their conversion, and what both planes must compute alike."""
