"""Files on a file system or in an object store, and who owns a folder there."""
