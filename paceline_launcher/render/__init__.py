"""Files that start a run on a scheduler, rendered from its configuration: `paceline render`."""
