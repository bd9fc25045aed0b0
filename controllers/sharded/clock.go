package sharded

import "time"

var processStart = time.Now()
