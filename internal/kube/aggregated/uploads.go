package aggregated

import (
	"encoding/json"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	uploadv1beta1 "kubevirt.io/containerized-data-importer-api/pkg/apis/upload/v1beta1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// uploadTokens is the resource that gives tokens. It has no objects.
const uploadTokens = "uploadtokenrequests"

const uploadTokenKind = "UploadTokenRequest"

// uploadToken answers with a token for an upload to a claim of the namespace. Nothing is kept.
func (s *Server) uploadToken(w http.ResponseWriter, r *http.Request, t target) error {
	// Clients of other versions may send fields that are not known here, so they are not refused.
	var req uploadv1beta1.UploadTokenRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&req); err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("the body is no %s: %s", uploadTokenKind, err))
	}
	name := req.Spec.PvcName
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return apierrors.NewBadRequest(fmt.Sprintf("spec.pvcName %q must be the name of a PersistentVolumeClaim", name))
	}
	token, err := s.opts.Uploads.Token(r.Context(), t.Namespace, name)
	if errdefs.IsNotFound(err) {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "persistentvolumeclaims"}, name)
	}
	if err != nil {
		return err
	}
	answer := uploadv1beta1.UploadTokenRequest{
		TypeMeta:   metav1.TypeMeta{Kind: uploadTokenKind, APIVersion: UploadGroup + "/" + UploadVersion},
		ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: req.Name, GenerateName: req.GenerateName},
		Spec:       req.Spec, Status: uploadv1beta1.UploadTokenRequestStatus{Token: token},
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusCreated)
	return json.NewEncoder(w).Encode(answer)
}

func uploadGroup() metav1.APIGroup {
	version := metav1.GroupVersionForDiscovery{GroupVersion: UploadGroup + "/" + UploadVersion, Version: UploadVersion}
	return metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: UploadGroup, Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}
}

// describeUploads answers the paths that say what the group of tokens is.
func describeUploads(w http.ResponseWriter, r *http.Request) {
	var body any = uploadGroup()
	if r.URL.Path != "/apis/"+UploadGroup {
		body = metav1.APIResourceList{
			TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: UploadGroup + "/" + UploadVersion,
			APIResources: []metav1.APIResource{{Name: uploadTokens, SingularName: "uploadtokenrequest", Namespaced: true, Kind: uploadTokenKind, Verbs: metav1.Verbs{"create"}}},
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body)
}
