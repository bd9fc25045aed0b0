package autoscaler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"gocloud.dev/blob"
	_ "gocloud.dev/blob/fileblob" // file:// URLs
	_ "gocloud.dev/blob/memblob"  // mem:// URLs, for tests
	"google.golang.org/protobuf/encoding/protojson"

	fleetpb "github.com/drover-sh/drover/api/rpc/fleet/v1alpha1"
)

// Store keeps the engine's records. Each save replaces one object as a whole, or leaves it as it was.
type Store interface {
	Load(ctx context.Context) (Saved, error)
	SaveRollUp(ctx context.Context, r *RollUp) error
	SaveRecord(ctx context.Context, r *Record) error
}

// Objects of the store: one roll-up and one record per cluster.
const (
	rollUpPrefix = "v1/rollups/"
	recordPrefix = "v1/machines/"
	objectSuffix = ".json"
)

// BlobStore keeps records in object storage: a directory, or whatever gocloud.dev/blob opens.
type BlobStore struct {
	bucket *blob.Bucket
	// directory is set where the bucket is one.
	directory *directory
}

var _ Store = &BlobStore{}

// OpenStore opens the store at a gocloud.dev/blob URL. A directory of a file URL is created where it is missing, is in
// use by one process at a time, and keeps through a power failure what was saved.
func OpenStore(ctx context.Context, address string) (*BlobStore, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("opening the state store %q: %w", address, err)
	}
	if u.Scheme == "file" {
		q := u.Query()
		for key, value := range map[string]string{"create_dir": "true", "no_tmp_dir": "true", "metadata": "skip",
			"dir_file_mode": "0700"} {
			if !q.Has(key) {
				q.Set(key, value)
			}
		}
		u.RawQuery = q.Encode()
	}
	bucket, err := blob.OpenBucket(ctx, u.String())
	if err != nil {
		return nil, fmt.Errorf("opening the state store %q: %w", address, err)
	}
	store := NewStore(bucket)
	if u.Scheme == "file" {
		if store.directory, err = openDirectory(filepath.FromSlash(u.Path), (*os.File).Sync); err != nil {
			_ = bucket.Close()
			return nil, fmt.Errorf("opening the state store %q: %w", address, err)
		}
	}
	return store, nil
}

// NewStore returns a store in bucket.
func NewStore(bucket *blob.Bucket) *BlobStore { return &BlobStore{bucket: bucket} }

// Close closes the bucket, and lets another process have its directory.
func (s *BlobStore) Close() error { return errors.Join(s.bucket.Close(), s.directory.close()) }

func objectKey(prefix, cluster string) string { return prefix + url.PathEscape(cluster) + objectSuffix }

// Load reads everything. An object that cannot be read is an error that names it: to start without it would mean to
// launch a second time what it records.
func (s *BlobStore) Load(ctx context.Context) (Saved, error) {
	var saved Saved
	err := s.each(ctx, rollUpPrefix, func(data []byte) error {
		r, err := decodeRollUp(data)
		saved.RollUps = append(saved.RollUps, r)
		return err
	})
	if err != nil {
		return Saved{}, err
	}
	err = s.each(ctx, recordPrefix, func(data []byte) error {
		r, err := decodeRecord(data)
		saved.Records = append(saved.Records, r)
		return err
	})
	if err != nil {
		return Saved{}, err
	}
	return saved, nil
}

func (s *BlobStore) each(ctx context.Context, prefix string, visit func([]byte) error) error {
	objects := s.bucket.List(&blob.ListOptions{Prefix: prefix})
	for {
		object, err := objects.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listing the state store under %s: %w", prefix, err)
		}
		if !strings.HasSuffix(object.Key, objectSuffix) {
			continue // what a write left behind that a kill interrupted
		}
		data, err := s.bucket.ReadAll(ctx, object.Key)
		if err != nil {
			return fmt.Errorf("reading state object %s: %w", object.Key, err)
		}
		if err := visit(data); err != nil {
			return fmt.Errorf("state object %s is corrupt, restore or remove it: %w", object.Key, err)
		}
	}
}

// SaveRollUp implements Store.
func (s *BlobStore) SaveRollUp(ctx context.Context, r *RollUp) error {
	data, err := protojson.Marshal(r.Message)
	if err != nil {
		return fmt.Errorf("encoding the roll-up of cluster %q: %w", r.Cluster, err)
	}
	return s.write(ctx, objectKey(rollUpPrefix, r.Cluster), data)
}

// SaveRecord implements Store.
func (s *BlobStore) SaveRecord(ctx context.Context, r *Record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encoding the record of cluster %q: %w", r.Cluster, err)
	}
	return s.write(ctx, objectKey(recordPrefix, r.Cluster), data)
}

func (s *BlobStore) write(ctx context.Context, key string, data []byte) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var file *os.File // stays nil where the bucket is no directory
	w, err := s.bucket.NewWriter(ctx, key, &blob.WriterOptions{ContentType: "application/json",
		BeforeWrite: func(as func(any) bool) error {
			as(&file)
			return nil
		}})
	if err != nil {
		return fmt.Errorf("writing state object %s: %w", key, err)
	}
	if _, err = w.Write(data); err == nil && s.directory != nil {
		// Before the name is given to it: otherwise a power failure may leave the name with half a content.
		err = s.directory.sync(file)
	}
	if err != nil {
		cancel() // the object stays as it was
		_ = w.Close()
		return fmt.Errorf("writing state object %s: %w", key, err)
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("writing state object %s: %w", key, err)
	}
	if err := s.directory.syncName(key); err != nil {
		return fmt.Errorf("writing state object %s: %w", key, err)
	}
	return nil
}

func decodeRollUp(data []byte) (*RollUp, error) {
	var message fleetpb.ClusterCapacityNeeds
	// A field that a later version has added does not keep this one from starting: the next roll-up replaces it anyway.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, &message); err != nil {
		return nil, err
	}
	return RollUpFromProto(&message)
}
