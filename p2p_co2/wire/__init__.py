"""What goes over the wire: the protobuf schema, its limits, and signatures. Knows no torch and no socket."""
