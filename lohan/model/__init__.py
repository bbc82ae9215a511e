"""A model and a machine as data, without torch: layout, state, shapes, plan, machine."""
