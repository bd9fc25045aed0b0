package chaos

import (
	"testing"

	"github.com/drover-sh/drover/internal/link"
)

// newLink returns a link that lasts as long as the test.
func newLink(t *testing.T, targets ...string) *link.Link {
	t.Helper()
	l, err := link.New(targets...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}
