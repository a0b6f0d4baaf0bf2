"""HTTP faces of the engine: pure translation to one Request and from one Event stream, behind one security layer."""
