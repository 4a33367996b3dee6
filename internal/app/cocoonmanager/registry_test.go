package cocoonmanager

import (
	"context"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/vm"
)

// catalog is a registry in this process, which may be unavailable.
type catalog struct {
	t    *testing.T
	down bool
	registry
}

func newCatalog(t *testing.T) *catalog {
	t.Helper()
	s := &catalog{t: t}
	h := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.down {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	s.base = server.URL
	return s
}

// put pushes a manifest with a record of that media type.
func (s *catalog) put(repo, tag, media, record string) {
	s.t.Helper()
	err := s.session(s.t.Context(), repo, tag, ociclient.Push, func(ctx context.Context, session *ociclient.Session) error {
		var layers []ociclient.Descriptor
		for _, data := range []string{"{}", "some memory", record} {
			digest := ociclient.Digest([]byte(data))
			if err := session.PutBlob(ctx, digest, int64(len(data)), func() io.Reader { return strings.NewReader(data) }); err != nil {
				return err
			}
			layers = append(layers, ociclient.Descriptor{MediaType: artifact.MediaMemory, Digest: digest, Size: int64(len(data))})
		}
		layers[2].MediaType, layers[2].Annotations = media, map[string]string{artifact.AnnotationTitle: artifact.TitleVMConfig}
		layers[0].MediaType = artifact.MediaConfig
		raw, err := json.Marshal(ociclient.Manifest{SchemaVersion: 2, MediaType: artifact.MediaManifest, Config: layers[0], Layers: layers[1:]})
		if err != nil {
			return err
		}
		_, err = session.PutManifest(ctx, tag, artifact.MediaManifest, raw)
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

func recordOf(t *testing.T, x snapshot.Snapshot) string {
	t.Helper()
	raw, err := json.Marshal(x)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// has reports whether REPOSITORY:TAG exists.
func (s *catalog) has(repo, tag string) bool {
	s.t.Helper()
	err := s.session(s.t.Context(), repo, tag, ociclient.Pull, func(ctx context.Context, session *ociclient.Session) error {
		_, err := session.Head(ctx, tag)
		return err
	})
	if err != nil && !errdefs.IsNotFound(err) {
		s.t.Fatal(err)
	}
	return err == nil
}

// Snapshots that earlier releases left at the root of the registry count for a VM unless they record another namespace.
// They are deleted with the VM only if they record the VM's namespace.
func TestWhatEarlierReleasesLeft(t *testing.T) {
	const tag = contract.HibernateSnapshotTag
	labels := func(namespace string) string {
		return recordOf(t, snapshot.Snapshot{Labels: map[string]string{contract.VMLabelPodNamespace: namespace, contract.VMLabelPodName: "db"}})
	}
	for name, tc := range map[string]struct {
		repo          string // "": nothing exists
		media, record string
		vm            string
		had, deleted  bool
	}{
		"nothing":                     {"", "", "", "vk--prod-eu.db", false, false},
		"of the namespace":            {"vk-prod-eu-db", artifact.MediaVMConfig, labels("prod-eu"), "vk--prod-eu.db", true, true},
		"under the old name":          {"vk-prod-eu-db", artifact.MediaVMConfig, labels("prod-eu"), "vk-prod-eu-db", true, true},
		"of the other namespace":      {"vk-prod-eu-db", artifact.MediaVMConfig, labels("prod"), "vk--prod-eu.db", false, false},
		"that does not say":           {"vk-prod-eu-db", artifact.MediaVMConfig, recordOf(t, snapshot.Snapshot{}), "vk--prod-eu.db", true, false},
		"with an owner":               {"vk-prod-eu-db", artifact.MediaVMConfig, recordOf(t, snapshot.Snapshot{Owner: vm.Owner{Namespace: "prod-eu"}}), "vk--prod-eu.db", true, true},
		"with another owner":          {"vk-prod-eu-db", artifact.MediaVMConfig, recordOf(t, snapshot.Snapshot{Owner: vm.Owner{Namespace: "prod"}, Labels: map[string]string{contract.VMLabelPodNamespace: "prod-eu"}}), "vk--prod-eu.db", false, false},
		"whose record is garbage":     {"vk-prod-eu-db", artifact.MediaVMConfig, "garbage", "vk--prod-eu.db", true, false},
		"without a record":            {"vk-prod-eu-db", artifact.MediaOther, labels("prod"), "vk--prod-eu.db", true, false},
		"of another VM":               {"vk-prod-eu-web", artifact.MediaVMConfig, labels("prod-eu"), "vk--prod-eu.db", false, false},
		"of a name that it gave":      {"agent", artifact.MediaVMConfig, labels("prod-eu"), "agent", true, true},
		"of a name that it could not": {"vk---prod-eu.db-abcdefghijklmnop", artifact.MediaVMConfig, labels("prod-eu"), "vk---prod-eu.db-abcdefghijklmnop", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newCatalog(t)
			if tc.repo != "" {
				s.put(tc.repo, tag, tc.media, tc.record)
			}
			of := controller.VM{Namespace: "prod-eu", Name: tc.vm}
			if had, err := s.HadOld(t.Context(), of, tag); had != tc.had || err != nil {
				t.Errorf("it was there: %v, %v", had, err)
			}
			if has, err := s.Has(t.Context(), of, tag); has || err != nil {
				t.Errorf("it is in its place: %v, %v", has, err)
			}
			place := contract.Repository(of.Namespace, of.Name)
			s.put(place, tag, artifact.MediaVMConfig, labels("prod-eu"))
			s.put(place, "latest", artifact.MediaVMConfig, labels("prod-eu"))
			if has, err := s.Has(t.Context(), of, tag); !has || err != nil {
				t.Errorf("in its place is %v, %v", has, err)
			}
			for range 2 { // a missing tag is no error
				if err := s.Delete(t.Context(), of, tag); err != nil {
					t.Fatal(err)
				}
			}
			if s.has(place, tag) || !s.has(place, "latest") {
				t.Errorf("in its place is %v, and latest %v", s.has(place, tag), s.has(place, "latest"))
			}
			if tc.repo != "" && s.has(tc.repo, tag) == tc.deleted {
				t.Errorf("in the old place is %v", !tc.deleted)
			}
		})
	}
}

// An unknown state is reported as an error, and nothing is deleted on a guess.
func TestARegistryThatDoesNotAnswer(t *testing.T) {
	s := newCatalog(t)
	of := controller.VM{Namespace: "prod", Name: "vk-prod-db"}
	s.put("vk-prod-db", "hibernate", artifact.MediaVMConfig, recordOf(t, snapshot.Snapshot{Labels: map[string]string{contract.VMLabelPodNamespace: "prod"}}))
	s.down = true
	if had, err := s.HadOld(t.Context(), of, "hibernate"); had || err == nil {
		t.Errorf("it was there: %v, %v", had, err)
	}
	if has, err := s.Has(t.Context(), of, "hibernate"); has || err == nil {
		t.Errorf("it is there: %v, %v", has, err)
	}
	if err := s.Delete(t.Context(), of, "hibernate"); err == nil {
		t.Error("it is deleted")
	}
	s.down = false
	if !s.has("vk-prod-db", "hibernate") {
		t.Error("it is gone")
	}
}
