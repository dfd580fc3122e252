// Waits that hang together.

/** How long a stopped load may take to note where it stopped; without that note, what it had stored still counts. */
export const STOP_MS = 2000;

/**
 * How long a load waits for the lock of its entry. One that was just stopped lets go of it at once, or is ended with its
 * worker after {@link STOP_MS}; so a page that stops a load and begins it again always has the lock.
 */
export const LOCK_WAIT_MS = STOP_MS + 1500;
