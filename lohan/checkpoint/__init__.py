"""Reading model folders and adapters into a store, and writing them from it."""
