"""Starting a group: what it is to be, all workers at once within one deadline, what took how long."""
