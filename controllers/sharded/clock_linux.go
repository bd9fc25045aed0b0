package sharded

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/drover-sh/drover/sharding"
)

// bootTime reads a clock that goes on while the machine is suspended, which Go's monotonic clock does not: a member
// that was suspended must not believe in its lease.
func bootTime() sharding.Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return time.Since(processStart)
	}
	return time.Duration(ts.Nano())
}
