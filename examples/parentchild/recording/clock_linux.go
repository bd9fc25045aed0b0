package recording

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since the machine was started, by CLOCK_BOOTTIME: the same for all of its processes.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return time.Duration(time.Now().UnixNano())
	}
	return time.Duration(ts.Nano())
}
