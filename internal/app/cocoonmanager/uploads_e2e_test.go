//go:build e2e

package cocoonmanager_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/storage/volume"
	uploadv1beta1 "kubevirt.io/containerized-data-importer-api/pkg/apis/upload/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/upload"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// uploads uploads a disk to a manager that is killed after each of its writes. The client repeats what was cut off, as virtctl does. In the end the claim
// names what the registry has, and when it has its volume, nothing is left of it there. The test makes the volume in place of a node.
func (r *rig) uploads(t *testing.T, ns string, k *killer) {
	t.Helper()
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: uploaded}
provisioner: %[2]s
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: storage.k8s.io/v1
kind: CSIStorageCapacity
metadata: {name: room-for-uploads, namespace: kube-system}
storageClassName: uploaded
capacity: 10Gi
nodeTopology: {matchLabels: {kubernetes.io/hostname: one}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: up, namespace: %[1]s, annotations: {cdi.kubevirt.io/storage.upload.target: "", cdi.kubevirt.io/storage.bind.immediate.requested: ""}}
spec: {accessModes: [ReadWriteOnce], storageClassName: uploaded, volumeMode: Block, resources: {requests: {storage: 1Mi}}}
`, ns, contract.VolumeDriver), "create", "-f", "-")
	r.Kubectl(t, "", "label", "node", "one", corev1.LabelHostname+"=one", "--overwrite")
	claim := &corev1.PersistentVolumeClaim{}
	state := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "up"}, claim); err != nil {
			return err.Error()
		}
		a := claim.Annotations
		return fmt.Sprint(a[upload.AnnReady], " ", a[upload.AnnPhase], " ", a[contract.KeyVolumeUpload] != "", " ", a[volume.AnnSelectedNode])
	}
	kubetest.Eventually(t, "the claim", state, "true Running false ")

	manager := r.uploader(t, k.manager)
	token := manager.token(t, ns, "up")
	disk := bootable(0)
	kubetest.Eventually(t, "the upload", func() string {
		code, text := manager.upload(t, "/v1beta1/upload-async", token, disk)
		if code == http.StatusOK || code == http.StatusConflict && strings.Contains(text, "was uploaded") { // the answer was lost
			return "done"
		}
		return fmt.Sprint(code, " ", text)
	}, "done")
	kubetest.Eventually(t, "the claim with its disk", state, "false Succeeded true one")
	repo, tag := contract.UploadRepository(ns, string(claim.UID)), strings.Replace(claim.Annotations[contract.KeyVolumeUpload], ":", "-", 1)
	if code := r.tag(t, repo, tag); code != http.StatusOK {
		t.Errorf("the registry answers %d for what was uploaded", code)
	}
	if code, text := manager.upload(t, "/v1beta1/upload", token, disk); code != http.StatusConflict && code != 0 {
		t.Errorf("another upload: %d %s", code, text)
	}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: up}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  storageClassName: uploaded
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: %[1]s, name: up, uid: %[2]s}
  csi: {driver: %[3]s, volumeHandle: x}
`, ns, claim.UID, contract.VolumeDriver), "create", "-f", "-")
	kubetest.Eventually(t, "what is left in the registry and the journal", func() string {
		journal := &corev1.ConfigMap{}
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: kubetest.Namespace, Name: "cocoon-uploads"}, journal); err != nil {
			return err.Error()
		}
		return fmt.Sprint(r.tag(t, repo, tag), " ", len(journal.Data))
	}, "404 0")
	r.Kubectl(t, "", "delete", "pvc/up", "-n", ns, "--timeout=240s")
	r.uploadsOfTwo(t, ns, k)
	r.Kubectl(t, "", "delete", "-n", "kube-system", "csistoragecapacity/room-for-uploads", "storageclass/uploaded", "pv/up")
}

// uploadsOfTwo uploads a disk of its own to each of two managers, for one claim at the same time. The claim names one of them. The registry keeps neither
// when the claim is gone.
func (r *rig) uploadsOfTwo(t *testing.T, ns string, k *killer) {
	t.Helper()
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: both, namespace: %s, annotations: {cdi.kubevirt.io/storage.upload.target: ""}}
spec: {accessModes: [ReadWriteOnce], storageClassName: uploaded, volumeMode: Block, resources: {requests: {storage: 1Mi}}}
`, ns), "create", "-f", "-")
	of := func(flag string) string { return k.manager.args[slices.Index(k.manager.args, flag)+1] }
	other := r.manager(t, nil, "--leader-elect=false", "--kubevirt-addr", freeAddr(t), "--kubevirt-cert", of("--kubevirt-cert"), "--kubevirt-key", of("--kubevirt-key"))
	other.start(t)
	defer other.kill()
	managers := []uploader{r.uploader(t, k.manager), r.uploader(t, other)}
	tokens := []string{managers[1].token(t, ns, "both"), managers[0].token(t, ns, "both")} // each takes that of the other
	last := make([]string, 2)
	answers := func() string {
		var both sync.WaitGroup
		for i, m := range managers {
			both.Go(func() {
				code, text := m.upload(t, "/v1beta1/upload", tokens[i], bootable(byte(i)))
				last[i] = fmt.Sprint(code == http.StatusOK || code == http.StatusConflict, " ", code, " ", text)
			})
		}
		both.Wait()
		return fmt.Sprint(strings.HasPrefix(last[0], "true"), " ", strings.HasPrefix(last[1], "true"))
	}
	kubetest.Eventually(t, "two uploads", answers, "true true")
	claim := &corev1.PersistentVolumeClaim{}
	if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "both"}, claim); err != nil {
		t.Fatal(err)
	}
	repo, taken := contract.UploadRepository(ns, string(claim.UID)), claim.Annotations[contract.KeyVolumeUpload]
	if code := r.tag(t, repo, strings.Replace(taken, ":", "-", 1)); code != http.StatusOK {
		t.Errorf("the registry answers %d for the disk %q that the claim names", code, taken)
	}
	r.Kubectl(t, "", "delete", "pvc/both", "-n", ns, "--timeout=240s")
	kubetest.Eventually(t, "what is left of two uploads", func() string {
		journal := &corev1.ConfigMap{}
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: kubetest.Namespace, Name: "cocoon-uploads"}, journal); err != nil {
			return err.Error()
		}
		return fmt.Sprint(r.tag(t, repo, strings.Replace(taken, ":", "-", 1)), " ", len(journal.Data))
	}, "404 0")
}

// bootable is a small disk that the manager takes for one.
func bootable(mark byte) []byte {
	disk := make([]byte, 1<<20)
	disk[0], disk[510], disk[511] = mark, 0x55, 0xaa
	return disk
}

// uploader sends requests to a manager as the API server does, and uploads as virtctl.
type uploader struct {
	url   string
	front tls.Certificate
}

func (r *rig) uploader(t *testing.T, manager *process) uploader {
	t.Helper()
	front, err := tls.LoadX509KeyPair(filepath.Join(r.Dir, "pki", "front-proxy-client.crt"), filepath.Join(r.Dir, "pki", "front-proxy-client.key"))
	if err != nil {
		t.Fatal(err)
	}
	return uploader{"https://" + manager.args[slices.Index(manager.args, "--kubevirt-addr")+1], front}
}

// send returns the status of the answer, 0 if there is none.
func (u uploader) send(t *testing.T, path string, body []byte, header http.Header) (code int, text string) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, u.url+path, bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	req.Header = header
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{u.front}}, DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(answer)
}

// token returns a token for a claim.
func (u uploader) token(t *testing.T, ns, claim string) string {
	t.Helper()
	var token uploadv1beta1.UploadTokenRequest
	kubetest.Eventually(t, "the token", func() string {
		code, text := u.send(t, "/apis/upload.cdi.kubevirt.io/v1beta1/namespaces/"+ns+"/uploadtokenrequests", []byte(`{"spec":{"pvcName":"`+claim+`"}}`),
			http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}})
		if code != http.StatusCreated {
			return fmt.Sprint(code, " ", text)
		}
		return fmt.Sprint(json.Unmarshal([]byte(text), &token))
	}, "<nil>")
	return token.Status.Token
}

// upload sends a disk.
func (u uploader) upload(t *testing.T, path, token string, disk []byte) (code int, text string) {
	return u.send(t, path, disk, http.Header{"Authorization": {"Bearer " + token}})
}
