"""The classifiers of torchvision."""
