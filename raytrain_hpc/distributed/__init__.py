"""Process groups: rendezvous, handshake, abort, flight records, replica checks."""
