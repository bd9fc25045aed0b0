package autoscaler

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestASavedObjectIsDurable: a power failure after a save takes nothing of it, and one in the midst of a save leaves what
// was there before. The content has to be on the disk before it gets its name, and the name before the save is
// acknowledged.
func TestASavedObjectIsDurable(t *testing.T) {
	dir := t.TempDir()
	store, err := OpenStore(t.Context(), "file://"+dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	var synced []string
	store.directory.sync = func(f *os.File) error {
		name, err := filepath.Rel(dir, f.Name())
		if strings.HasSuffix(name, ".tmp") {
			content, _ := os.ReadFile(f.Name())
			if !strings.Contains(string(content), `"cluster":"east"`) {
				t.Errorf("%s is synced with content %q", name, content)
			}
			if _, err := os.Stat(filepath.Join(dir, "v1/machines/east.json")); !errors.Is(err, fs.ErrNotExist) && len(synced) == 0 {
				t.Error("the object has its name before its content is durable")
			}
			name = "content"
		}
		synced = append(synced, name)
		return err
	}
	for range 2 {
		if err := store.SaveRecord(t.Context(), &Record{Version: recordVersion, Cluster: "east"}); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"content", "v1/machines", "v1", ".", "content", "v1/machines"}
	if !slices.Equal(synced, want) {
		t.Errorf("synced %q, want %q", synced, want)
	}
}

func TestAnObjectThatCannotBeMadeDurableStaysAsItWas(t *testing.T) {
	store, err := OpenStore(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	if err := store.SaveRecord(t.Context(), &Record{Version: recordVersion, Cluster: "east"}); err != nil {
		t.Fatal(err)
	}
	full := errors.New("no space left")
	store.directory.sync = func(*os.File) error { return full }
	changed := &Record{Version: recordVersion, Cluster: "east", Grants: []grant{{Count: 7}}}
	if err := store.SaveRecord(t.Context(), changed); !errors.Is(err, full) {
		t.Errorf("got %v, want %v", err, full)
	}
	saved, err := store.Load(t.Context())
	if err != nil || len(saved.Records) != 1 || len(saved.Records[0].Grants) != 0 {
		t.Errorf("loaded %v, %v, want the record of before", saved.Records, err)
	}
}

// TestAStateDirectoryHasOneUser: a second autoscaler on the same state does not start, and a successor does.
func TestAStateDirectoryHasOneUser(t *testing.T) {
	address := "file://" + t.TempDir()
	first, err := OpenStore(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	if second, err := OpenStore(t.Context(), address); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("got %v, %v, want an error that says who has it", second, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	successor, err := OpenStore(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	_ = successor.Close()
}
