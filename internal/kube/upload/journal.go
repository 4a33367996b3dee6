package upload

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Journal names what was uploaded and may still be in the registry. It is a ConfigMap with a key for each, which managers write without reading the others'.
type Journal struct {
	Client client.Client // its reads must not be cached
	Object types.NamespacedName
}

// Entry is an image in the registry.
type Entry struct {
	Claim
	Digest string // sha256:<hex>
}

// mostWaiting bounds the entries of a namespace: a ConfigMap has room for about 5,000 of all namespaces.
const mostWaiting = 200

const algorithm = "sha256:"

func (e Entry) key() string { return string(e.UID) + "." + strings.TrimPrefix(e.Digest, algorithm) }

// Add notes an image that the registry is about to get. To note one again is no error, and writes nothing.
func (j Journal) Add(ctx context.Context, e Entry) error {
	all, err := j.List(ctx)
	if err != nil {
		return errdefs.Unavailablef("note an upload: %w", err)
	}
	if slices.Contains(all, e) {
		return nil
	}
	waiting := 0
	for _, other := range all {
		if other.Namespace == e.Namespace {
			waiting++
		}
	}
	if waiting >= mostWaiting {
		return errdefs.Exhaustedf("%d disks of namespace %s wait in the registry until their volumes are made; start their pods, or delete claims", waiting, e.Namespace)
	}
	const attempts = 3
	for range attempts {
		err := j.patch(ctx, e.key(), e.String())
		if apierrors.IsNotFound(err) {
			object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: j.Object.Namespace, Name: j.Object.Name}, Data: map[string]string{e.key(): e.String()}}
			if err = j.Client.Create(ctx, object); apierrors.IsAlreadyExists(err) { // another manager made it
				continue
			}
		}
		if err != nil {
			return errdefs.Unavailablef("note an upload in ConfigMap %s: %w", j.Object, err)
		}
		return nil
	}
	return errdefs.Unavailablef("note an upload in ConfigMap %s: it is made and removed at the same time", j.Object)
}

// Drop forgets an image that the registry does not have any more.
func (j Journal) Drop(ctx context.Context, e Entry) error {
	if err := client.IgnoreNotFound(j.patch(ctx, e.key(), nil)); err != nil {
		return fmt.Errorf("forget an upload in ConfigMap %s: %w", j.Object, err)
	}
	return nil
}

func (j Journal) patch(ctx context.Context, key string, value any) error {
	body, err := json.Marshal(map[string]any{"data": map[string]any{key: value}})
	if err != nil {
		return err
	}
	return j.Client.Patch(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: j.Object.Namespace, Name: j.Object.Name}}, client.RawPatch(types.MergePatchType, body))
}

// List returns all entries. What is no entry is left alone.
func (j Journal) List(ctx context.Context) ([]Entry, error) {
	object := &corev1.ConfigMap{}
	if err := j.Client.Get(ctx, j.Object, object); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("read the uploads in ConfigMap %s: %w", j.Object, err)
	}
	var all []Entry
	for key, value := range object.Data {
		uid, hex, ok := strings.Cut(key, ".")
		namespace, name, named := strings.Cut(value, "/")
		if ok && named {
			all = append(all, Entry{Claim{namespace, name, types.UID(uid)}, algorithm + hex})
		}
	}
	return all, nil
}
