package rollup

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// unseenGrace is how long the cache is waited for to show a write. It does in milliseconds, unless the API server has a hard
// time. What comes and goes between two looks it never shows.
const unseenGrace = 5 * time.Second

// unseen are this process's last writes that the cache does not show yet, by the objects' names. Whoever acted on what the
// cache shows would write the same again, most of all where the API server is slow already. The zero value is ready for use.
type unseen struct {
	clock clock.PassiveClock // nil: the real one

	mu     sync.Mutex
	writes map[string]unseenWrite
}

// An unseenWrite has left an object at a version, or has deleted the one of a UID.
type unseenWrite struct {
	at      time.Time
	version string
	deleted types.UID
}

func (u *unseen) now() time.Time {
	if u.clock == nil {
		return time.Now()
	}
	return u.clock.Now()
}

// wrote notes a write that the API server has taken, with the object as it is since.
func (u *unseen) wrote(obj client.Object) {
	u.note(obj.GetName(), unseenWrite{version: obj.GetResourceVersion()})
}

// deleted notes that the API server has deleted an object.
func (u *unseen) deleted(obj client.Object) {
	u.note(obj.GetName(), unseenWrite{deleted: obj.GetUID()})
}

func (u *unseen) note(name string, w unseenWrite) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.writes == nil {
		u.writes = make(map[string]unseenWrite)
	}
	w.at = u.now()
	u.writes[name] = w
}

// wait returns for how long the cache, which shows cached under that name, or nothing if it is nil, is to be waited for: its
// next event is about to come. Zero says that it shows the last write, or that there was none.
func (u *unseen) wait(name string, cached client.Object) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	w, found := u.writes[name]
	if !found {
		return 0
	}
	if left := unseenGrace - u.now().Sub(w.at); left > 0 && !w.shownBy(cached) {
		return left
	}
	delete(u.writes, name)
	return 0
}

func (w unseenWrite) shownBy(cached client.Object) bool {
	switch {
	case w.deleted != "":
		return cached == nil || cached.GetUID() != w.deleted
	case cached == nil:
		return false
	}
	c, err := resourceversion.CompareResourceVersion(cached.GetResourceVersion(), w.version)
	return err != nil || c >= 0
}

// shownIf returns what the cache shows, for wait.
func shownIf(exists bool, cached client.Object) client.Object {
	if !exists {
		return nil
	}
	return cached
}
