//go:build !linux

package recording

import "time"

// Now is the wall clock, where there is no better one that all processes share.
func Now() time.Duration { return time.Duration(time.Now().UnixNano()) }
