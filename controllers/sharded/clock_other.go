//go:build !linux

package sharded

import (
	"time"

	"github.com/drover-sh/drover/sharding"
)

// bootTime is Go's monotonic clock. It stands still while the machine is suspended; members run on Linux.
func bootTime() sharding.Instant { return time.Since(processStart) }
