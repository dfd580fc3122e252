// A worker's browser without the origin private file system.
delete StorageManager.prototype.getDirectory;
