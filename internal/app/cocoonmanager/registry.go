package cocoonmanager

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// registryLimit is the timeout of one request to the registry, including retries.
const registryLimit = 10 * time.Second

// registry queries an OCI registry for tags. It implements controller.Registry.
type registry struct {
	base string // URL
	auth snapshot.Auth
}

// Has implements controller.Registry.
func (r registry) Has(ctx context.Context, of controller.VM, tag string) (bool, error) {
	err := r.session(ctx, contract.Repository(of.Namespace, of.Name), tag, "pull", func(ctx context.Context, s *ociclient.Session) error {
		_, err := s.Head(ctx, tag)
		return err
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// HadOld implements controller.Registry.
func (r registry) HadOld(ctx context.Context, of controller.VM, tag string) (bool, error) {
	repo := contract.OldRepository(of.Namespace, of.Name)
	if repo == "" {
		return false, nil
	}
	whose, err := r.whose(ctx, repo, tag)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil && (whose == of.Namespace || whose == ""), err
}

// Delete implements controller.Registry.
func (r registry) Delete(ctx context.Context, of controller.VM, tag string) error {
	if err := r.remove(ctx, contract.Repository(of.Namespace, of.Name), tag); err != nil {
		return err
	}
	repo := contract.OldRepository(of.Namespace, of.Name)
	if repo == "" {
		return nil
	}
	switch whose, err := r.whose(ctx, repo, tag); {
	case errdefs.IsNotFound(err) || err == nil && whose != of.Namespace: // it does not exist, or is not certainly the VM's
		return nil
	case err != nil:
		return err
	}
	return r.remove(ctx, repo, tag)
}

func (r registry) remove(ctx context.Context, repo, tag string) error {
	err := r.session(ctx, repo, tag, "pull,push,delete", func(ctx context.Context, s *ociclient.Session) error {
		return s.DeleteManifest(ctx, tag)
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// maxRecord is the maximum size of a snapshot's record; larger ones are ignored.
const maxRecord = 16 << 20

// whose returns the namespace recorded in the snapshot in repo, "" when it records none. NotFound.
func (r registry) whose(ctx context.Context, repo, tag string) (namespace string, err error) {
	err = r.session(ctx, repo, tag, "pull", func(ctx context.Context, s *ociclient.Session) error {
		raw, _, err := s.Manifest(ctx, tag)
		if err != nil {
			return err
		}
		var m ociclient.Manifest
		if json.Unmarshal(raw, &m) != nil {
			return nil // not a Cocoon snapshot
		}
		for _, l := range m.Layers {
			if l.MediaType != artifact.MediaVMConfig || l.Annotations[artifact.AnnotationTitle] != artifact.TitleVMConfig || l.Size > maxRecord {
				continue
			}
			blob := s.Blob(ctx, l.Digest, l.Size)
			defer blob.Close()
			data, err := io.ReadAll(io.LimitReader(blob, maxRecord))
			if err != nil {
				return err
			}
			var record snapshot.Snapshot
			if json.Unmarshal(data, &record) == nil {
				if namespace = record.Owner.Namespace; namespace == "" {
					namespace = record.Labels[contract.VMLabelPodNamespace]
				}
			}
			return nil
		}
		return nil
	})
	return namespace, err
}

func (r registry) session(ctx context.Context, repo, tag, scope string, do func(context.Context, *ociclient.Session) error) error {
	ref, err := ociclient.ParseRef(r.base + "/" + repo + ":" + tag)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, registryLimit)
	defer cancel()
	s, err := ociclient.Open(ctx, ref, ociclient.Auth{Token: r.auth.Token, CA: r.auth.CA}, scope, ociclient.Config{Attempts: 2})
	if err != nil {
		return err
	}
	defer s.Close()
	return do(ctx, s)
}
